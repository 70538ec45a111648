"""The report's files: figures drawn side by side, tables, sentences and the page that holds them."""
