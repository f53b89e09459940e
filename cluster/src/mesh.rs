//! mesh.
