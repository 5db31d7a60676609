"""What measures this project itself; no part of the wheel."""
