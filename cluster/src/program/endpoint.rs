//! Names of endpoints, step by step, with the types of their requests and answers.
//!
//! `mesh.namespace("shop")?.component("stock")?.endpoint::<Ask, Told>("count")?` names `shop/stock/count`. An
//! [`Endpoint`] is a name with types: both sides hold one, one serves it, the others call it.

use std::{collections::BTreeMap, marker::PhantomData, sync::Arc};

use starling_ids::{EndpointName, NameError};

use super::{
    client::Client,
    instances::{self, InstanceView},
    tries::Shared,
    watch::InstanceWatch,
};
use crate::mesh::Mesh;

/// Requests that one endpoint works on at a time, unless set otherwise.
pub(super) const IN_FLIGHT_MAX: usize = 4_096;

/// The product's own endpoints.
pub(super) const RESERVED: &str = "starling";

impl Mesh {
    /// Begins the name of an endpoint: 1 to 48 of `a-z 0-9 . _ -`. `starling` is reserved.
    pub fn namespace(&self, name: &str) -> Result<Namespace, NameError> {
        if name == RESERVED {
            let rule = "this namespace belongs to the product; take another";
            return Err(NameError { field: "namespace", value: name.to_owned(), rule });
        }
        EndpointName::new(&format!("{name}/c/e"))?;
        Ok(Namespace { mesh: self.clone(), name: name.to_owned() })
    }

    /// Every instance of every endpoint that this node knows, sorted by (endpoint, node).
    #[must_use]
    pub fn list_instances(&self) -> Vec<InstanceView> {
        instances::list(&self.current(), |_| true)
    }

    /// Follows all instances.
    #[must_use]
    pub fn watch_instances(&self) -> InstanceWatch {
        InstanceWatch::new(self, |_| true)
    }
}

/// The first part of a name.
#[derive(Debug, Clone)]
pub struct Namespace {
    mesh: Mesh,
    name: String,
}

impl Namespace {
    /// The second part.
    pub fn component(&self, name: &str) -> Result<Component, NameError> {
        EndpointName::new(&format!("{}/{name}/e", self.name))?;
        Ok(Component { mesh: self.mesh.clone(), path: format!("{}/{name}", self.name) })
    }
}

/// The first two parts of a name.
#[derive(Debug, Clone)]
pub struct Component {
    mesh: Mesh,
    path: String,
}

impl Component {
    /// The whole name, with the types that cross it.
    pub fn endpoint<Req, Resp>(&self, name: &str) -> Result<Endpoint<Req, Resp>, NameError> {
        let name = EndpointName::new(&format!("{}/{name}", self.path))?;
        Ok(Endpoint::new(&self.mesh, name))
    }

    /// Instances of all endpoints of this component, sorted by (endpoint, node).
    #[must_use]
    pub fn list_instances(&self) -> Vec<InstanceView> {
        let prefix = format!("{}/", self.path);
        instances::list(&self.mesh.current(), |view| view.id.endpoint.as_str().starts_with(&prefix))
    }
}

/// A named endpoint with the types of its requests and answers. Cheap to clone.
pub struct Endpoint<Req, Resp> {
    pub(super) mesh: Mesh,
    pub(super) name: EndpointName,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) in_flight_max: usize,
    shared: Arc<Shared>,
    _of: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> Clone for Endpoint<Req, Resp> {
    fn clone(&self) -> Self {
        Self {
            mesh: self.mesh.clone(),
            name: self.name.clone(),
            labels: self.labels.clone(),
            in_flight_max: self.in_flight_max,
            shared: self.shared.clone(),
            _of: PhantomData,
        }
    }
}

impl<Req, Resp> std::fmt::Debug for Endpoint<Req, Resp> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.name)
    }
}

impl<Req, Resp> Endpoint<Req, Resp> {
    pub(super) fn new(mesh: &Mesh, name: EndpointName) -> Self {
        let (labels, in_flight_max, shared) = (BTreeMap::new(), IN_FLIGHT_MAX, Shared::new());
        Self { mesh: mesh.clone(), name, labels, in_flight_max, shared, _of: PhantomData }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &EndpointName {
        &self.name
    }

    /// A label of the instance that is served next, for callers and pickers.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// How many requests the instance that is served next works on at a time, at least 1; more are refused as
    /// overloaded.
    #[must_use]
    pub fn in_flight_max(mut self, max: usize) -> Self {
        self.in_flight_max = max;
        self
    }

    /// A client of all its instances. Clients of one endpoint value take turns together and share a retry budget.
    #[must_use]
    pub fn client(&self) -> Client<Req, Resp> {
        Client::new(&self.mesh, self.name.clone(), self.shared.clone())
    }

    /// Its instances, sorted by node.
    #[must_use]
    pub fn list_instances(&self) -> Vec<InstanceView> {
        instances::of(&self.mesh.current(), &self.name)
    }

    /// Follows its instances.
    #[must_use]
    pub fn watch(&self) -> InstanceWatch {
        let name = self.name.clone();
        InstanceWatch::new(&self.mesh, move |view| view.id.endpoint == name)
    }
}
