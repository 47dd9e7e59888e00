"""Pictures and tables of runs, from the files in their folders."""
