//! Writes this node's own entries in the directory.

use starling_cluster::{discovery::Instance, mesh::Mesh};
use starling_ids::EndpointName;

/// Adds or replaces an entry. What is not given stays as it was.
pub(crate) fn announce(mesh: &Mesh, mut instance: Instance) {
    let published = mesh.publish(move |record| {
        match record.instances.binary_search_by(|known| known.endpoint.cmp(&instance.endpoint)) {
            Ok(at) => {
                let known = &mut record.instances[at];
                instance.card = instance.card.or(known.card);
                instance.bundle = instance.bundle.or(known.bundle);
                instance.capacity = instance.capacity.or(known.capacity);
                instance.layout = instance.layout.or(known.layout);
                for (key, value) in std::mem::take(&mut known.labels) {
                    instance.labels.entry(key).or_insert(value);
                }
                *known = instance;
            }
            Err(at) => record.instances.insert(at, instance),
        }
    });
    log(published);
}

/// Takes an entry away.
pub(crate) fn withdraw(mesh: &Mesh, endpoint: &EndpointName) {
    log(mesh.publish(|record| record.instances.retain(|known| known.endpoint != *endpoint)));
}

/// A record that is too large, or a step that no life has, says so here; the entry stays as it was.
fn log(published: Result<(), impl std::fmt::Display>) {
    if let Err(error) = published {
        tracing::error!(%error, "the directory's entry was not changed");
    }
}
