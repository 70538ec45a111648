"""The explorer: one page with every row, the planner's memory and pipeline schedules."""
