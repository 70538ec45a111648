"""Results: tables of attempts and steps, statistics on them, and text for people."""
