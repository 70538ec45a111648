"""Text for people: the console, number formats, argument parsing, log tails and hidden secrets."""
