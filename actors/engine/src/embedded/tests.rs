//! Tests of the embedded engine as a whole.

mod real_model;
