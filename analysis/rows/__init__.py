"""Loading, completing, labelling, matching and ranking of attempts: the basis of every table, figure and sentence."""
