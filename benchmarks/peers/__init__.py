"""Run other projects' programs unchanged, for side-by-side figures."""
