//! Process groups: endpoints and actors of one kind, anywhere, under one name; speak to all of them.
//!
//! Called by programs. A group is a label on instances in the directory, so a member leaves with its guard, its actor or
//! its node, and every node lists the same members as soon as it has the news.
//! Bounds: [`AT_ONCE`] calls of one broadcast at a time.

use std::{marker::PhantomData, sync::Arc};

use futures::StreamExt;
use serde::{Serialize, de::DeserializeOwned};
use starling_ids::{EndpointName, NameError};

use super::{
    actor::{Actor, ActorHandle},
    client::Client,
    error::CallError,
    instances::{self, InstanceId, InstanceView},
    serve::{ServeError, ServedEndpoint, change_instance},
    spawn::endpoint_of,
    tries::Shared,
    watch::InstanceWatch,
};
use crate::{
    discovery::{Instance, InstanceKind, Lifecycle},
    mesh::Mesh,
};

/// How endpoints of actors begin.
const ACTORS: &str = "starling/program/";
/// Calls of one broadcast under way at a time.
const AT_ONCE: usize = 128;

impl Mesh {
    /// A group by its name, 1 to 48 of `a-z 0-9 . _ -`, with the types that its members speak.
    pub fn group<Req, Resp>(&self, name: &str) -> Result<Group<Req, Resp>, NameError> {
        EndpointName::new(&format!("group/{name}/e"))?;
        Ok(Group { mesh: self.clone(), label: Arc::from(format!("group.{name}")), _of: PhantomData })
    }
}

/// All members of one name. Cheap to clone.
pub struct Group<Req, Resp> {
    mesh: Mesh,
    label: Arc<str>,
    _of: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> Clone for Group<Req, Resp> {
    fn clone(&self) -> Self {
        Self { mesh: self.mesh.clone(), label: self.label.clone(), _of: PhantomData }
    }
}

impl<Req, Resp> std::fmt::Debug for Group<Req, Resp> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({})", self.label)
    }
}

impl<Req, Resp> Group<Req, Resp> {
    /// Makes an endpoint of this node a member while the guard lives and the endpoint is served.
    pub fn join(&self, served: &ServedEndpoint) -> Result<GroupMember, ServeError> {
        served.set_label(self.label.as_ref(), "member")?;
        let endpoint = served.id().endpoint;
        Ok(GroupMember { mesh: self.mesh.clone(), label: self.label.clone(), endpoint })
    }

    /// Makes an actor of this node a member while the guard and the actor live, restarts included.
    pub fn join_actor<A>(&self, actor: &ActorHandle<A>) -> Result<GroupMember, ServeError>
    where
        A: Actor<Request = Req, Reply = Resp>,
    {
        let endpoint = endpoint_of(actor.name())?;
        let label = self.label.as_ref().to_owned();
        actor.mesh.publish(|record| {
            let known = record.instances.iter_mut().find(|instance| instance.endpoint == endpoint);
            if let Some(instance) = known {
                instance.labels.insert(label, "member".to_owned());
                return;
            }
            let instance = Instance::new(endpoint.clone(), InstanceKind::Service, Lifecycle::Serving);
            record.instances.push(Instance { labels: [(label, "member".to_owned())].into(), ..instance });
        })?;
        // One that ended meanwhile has been forgotten before it was made a member.
        if actor.mesh.programs().life(actor.name()).is_none() {
            forget_actor(&actor.mesh, &endpoint);
        }
        Ok(GroupMember { mesh: actor.mesh.clone(), label: self.label.clone(), endpoint })
    }

    /// Members as this node knows them, sorted by (endpoint, node), callable or not.
    #[must_use]
    pub fn members(&self) -> Vec<InstanceView> {
        instances::list(&self.mesh.current(), |view| view.labels.contains_key(self.label.as_ref()))
    }

    /// Follows the members.
    #[must_use]
    pub fn watch(&self) -> InstanceWatch {
        let label = self.label.clone();
        InstanceWatch::new(&self.mesh, move |view| view.labels.contains_key(label.as_ref()))
    }
}

impl<Req, Resp> Group<Req, Resp>
where
    Req: Serialize,
    Resp: DeserializeOwned + Send + 'static,
{
    /// Asks every member that can be called, all at the same time, and collects what each said, in the members' order.
    pub async fn broadcast(&self, request: &Req) -> Vec<(InstanceId, Result<Resp, CallError>)> {
        let callable: Vec<InstanceView> = self.members().into_iter().filter(InstanceView::is_callable).collect();
        let calls = callable.into_iter().map(|member| async move {
            let client = Client::<Req, Resp>::new(&self.mesh, member.id.endpoint.clone(), Shared::new());
            let client = client.direct(&member.id);
            let answer = client.unary(request).await;
            (member.id, answer)
        });
        futures::stream::iter(calls).buffered(AT_ONCE).collect().await
    }
}

/// A membership; dropping it leaves the group, the endpoint goes on.
#[derive(Debug)]
#[must_use = "dropping it leaves the group"]
pub struct GroupMember {
    mesh: Mesh,
    label: Arc<str>,
    endpoint: EndpointName,
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        let left = change_instance(&self.mesh, &self.endpoint, |instance| {
            instance.labels.remove(self.label.as_ref());
        });
        if let Err(error) = left {
            tracing::debug!(%error, "a group was not left");
        }
        let of_nothing = |instance: &Instance| instance.endpoint == self.endpoint && instance.labels.is_empty();
        // An actor is listed for its groups alone.
        if self.endpoint.as_str().starts_with(ACTORS) && self.mesh.own_record().instances.iter().any(of_nothing) {
            forget_actor(&self.mesh, &self.endpoint);
        }
    }
}

/// An actor is no member of any group any more.
pub(super) fn forget_actor(mesh: &Mesh, endpoint: &EndpointName) {
    if !mesh.own_record().instances.iter().any(|instance| instance.endpoint == *endpoint) {
        return;
    }
    let told = mesh.publish(|record| record.instances.retain(|instance| instance.endpoint != *endpoint));
    if let Err(error) = told {
        tracing::debug!(%error, "an actor was not unlisted");
    }
}
