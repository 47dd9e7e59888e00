"""How ranks are started, and how a process knows which one it is."""
