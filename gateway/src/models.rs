//! `GET /v1/models` and `GET /v1/models/{id}`, from what this node knows.

use std::sync::Arc;

use axum::{
    extract::{Path, State, rejection::PathRejection},
    response::Response,
};
use bytes::BytesMut;
use hyper::HeaderMap;
use starling_actors::engine::ModelCard;

use crate::{
    context::{App, buffer},
    error::Fault,
    metrics::Route,
    openai::json,
    reply,
};

/// All models that can be asked for now.
pub(crate) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let ticket = app.admission.arrive(Route::Models);
    if let Err(fault) = app.authorize(&headers) {
        return reply::refuse(&fault.into(), ticket);
    }
    let mut out = buffer();
    out.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    for (index, served) in app.backend.models().iter().enumerate() {
        if index > 0 {
            out.extend_from_slice(b",");
        }
        write(&mut out, &served.card);
    }
    out.extend_from_slice(b"]}");
    reply::document(out.freeze(), ticket)
}

/// One of them. Slashes in its name may be written as they are or as `%2F`.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response {
    let ticket = app.admission.arrive(Route::Models);
    // A name that is not UTF-8 is nobody's, like the empty one.
    let name = name.map_or_else(|_| String::new(), |Path(name)| name);
    let card = app.authorize(&headers).map_err(Fault::from).and_then(|_| app.card(&name));
    match card {
        Ok(card) => {
            let mut out = buffer();
            write(&mut out, &card);
            reply::document(out.freeze(), ticket)
        }
        Err(fault) => reply::refuse(&fault, ticket),
    }
}

fn write(out: &mut BytesMut, card: &ModelCard) {
    out.extend_from_slice(b"{\"id\":");
    json::string(out, card.id.as_str());
    // Models have no date here; clients want a number.
    out.extend_from_slice(b",\"object\":\"model\",\"created\":0,\"owned_by\":\"starling\",\"max_model_len\":");
    json::integer(out, u64::from(card.context_length));
    out.extend_from_slice(b"}");
}
