"""Outputs that pages show below their commands: found, compared with what the commands print, and written anew."""
