"""The report's files: figures drawn in parallel, tables, sentences and the page that holds them."""
