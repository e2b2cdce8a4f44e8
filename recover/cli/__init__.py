"""`holdfast`, the command line: looks at runs, generations and exports, and looks after them."""
