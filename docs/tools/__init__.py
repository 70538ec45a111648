"""Scripts that write this project's own pages and figures; they are not part of the installed package."""
