"""Whole deployments: servers, proxy and clients, as a site runs them."""
