"""Trellis codes: planes chosen by the Viterbi algorithm, column by column, against the Hessian."""
