"""Gates as presses of kvpress: one file per method, real Python that `bundle` joins with a gate's weights.  Needs kvpress to import."""
