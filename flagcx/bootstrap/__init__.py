"""How ranks find out who they are and find each other."""
