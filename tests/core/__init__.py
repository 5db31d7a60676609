"""kvpp_core proved: properties, real gloo groups, and a simulated device."""
