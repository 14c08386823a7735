"""The commands: each stage is a script that one reads from top to bottom, in the wheel behind `livt`."""
