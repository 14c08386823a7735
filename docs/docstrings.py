"""Let the section `Example:` of a docstring be rendered as code."""

import griffe


class ExampleSections(griffe.Extension):
    """Name sections as griffe knows them."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Rename the section of one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
