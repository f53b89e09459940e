//! Who is in the cluster, and how bytes travel between its nodes.
