"""The command line: parsers, help texts and one function per command."""
