"""Starting the ranks of a job on this host, watching them, and ending them. See ``notebook.launch``."""
