"""The explorer: the page's view of every row, with the planner's memory model and pipeline schedules."""
