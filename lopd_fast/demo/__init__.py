"""The demo: a 135M-parameter agent learns the house conventions of companies, on a CPU, in minutes."""
