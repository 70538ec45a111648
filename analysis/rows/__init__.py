"""Attempts read, completed, named, matched and ranked: what every table, figure and sentence starts from."""
