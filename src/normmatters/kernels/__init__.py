#: Plans that are kept of each kind: one is for a shape and its options.
MAX_PLANS = 4096
