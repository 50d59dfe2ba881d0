"""From the tables of a run to headline metrics, comparisons, labelled arrays and figures. Host only; no JAX, no network."""
