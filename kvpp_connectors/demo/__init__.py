"""What `kvpp demo` runs: a tiny model, engines and servers on this machine, and the tables."""
