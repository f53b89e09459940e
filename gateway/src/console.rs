//! `GET /ui`: a page that shows the cluster live, and the JSON that it reads.
//!
//! The page, its style and its script are three files in the program; they ask nothing of other hosts. The data are those of
//! the inspection verbs, from any node. Where API keys are set, data want one with the scope `view`; the page asks for it.
//! Bounds: [`VIEWS_AT_ONCE`] views at one time, each within the time of a request.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, State},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{
    HeaderMap,
    header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS},
};

use crate::{
    backend::View,
    caller::Scope,
    context::App,
    error::{Fault, HttpFault},
    metrics::Route,
    reply,
};

/// Views of the cluster made at one time; further ones wait.
pub(crate) const VIEWS_AT_ONCE: usize = 4;

/// The page runs its own script and reads its own host, nothing else, and nobody frames it.
const POLICY: &str = "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'";

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/ui", get(async || file("text/html; charset=utf-8", include_str!("console/page.html"))))
        .route("/ui/page.css", get(async || file("text/css; charset=utf-8", include_str!("console/page.css"))))
        .route("/ui/page.js", get(async || file("text/javascript; charset=utf-8", include_str!("console/page.js"))))
        .route("/ui/data/{*what}", get(data))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    let set: [(HeaderName, &'static str); 4] = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    for (name, value) in set {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn data(State(app): State<Arc<App>>, Path(what): Path<String>, headers: HeaderMap) -> Response {
    let ticket = app.admission.arrive(Route::Console);
    let shown = async {
        may_see(&app, &headers)?;
        let unknown = || HttpFault::UnknownRoute { method: "GET".to_owned(), path: format!("/ui/data/{what:.100}") };
        let view = view(&what).ok_or_else(unknown)?;
        app.in_time(async {
            // Never closed, so it is only ever waited for.
            let _turn = app.views.acquire().await.ok();
            Ok(app.backend.view(view).await?)
        })
        .await
    };
    match shown.await {
        Ok(json) => reply::document(json, ticket),
        Err(fault) => reply::refuse(&fault, ticket),
    }
}

/// Who may see the cluster: anybody where no key is asked for, as with the API.
fn may_see(app: &App, headers: &HeaderMap) -> Result<(), Fault> {
    let caller = app.authorize(headers)?;
    let allowed = app.config.api_keys.is_empty() || caller.scopes.contains(&Scope::View);
    if allowed { Ok(()) } else { Err(HttpFault::MayNotSee.into()) }
}

fn view(what: &str) -> Option<View> {
    Some(match what {
        "nodes" => View::Nodes,
        "instances" => View::Instances,
        "actors" => View::Actors,
        "kv" => View::Caches,
        "plan" => View::Plan,
        "requests" => View::Requests,
        other => View::Why(other.strip_prefix("why/")?.parse().ok()?),
    })
}
