//! The planner beside a model of a cluster: every trace must come to rest, and nothing may swing.

mod cluster;
mod faults;
mod traces;
