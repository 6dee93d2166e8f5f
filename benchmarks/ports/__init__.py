"""Evidence for `assert_parity`: pairs of models of other authors, and faults planted in them."""
