"""The command line: options, settings, run folders to resume and inherit from, and the command `livt`.

The only code that knows flags. Library modules take specs or plain values and import nothing from here.
"""
