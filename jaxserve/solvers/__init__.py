"""The assignment problem of one window, and three ways to solve it: cvxpy (to read and extend), HiGHS (direct), and on the device."""
