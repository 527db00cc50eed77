//! Keeps a ConfigMap beside each object: `NAME-SUFFIX` holds the object's `spec.value`, and goes when the object goes.
//! `SUFFIX` is the operator's `config.suffix`, so that many copies can run side by side.

use serde::Deserialize;
use serde_json::json;
use std::error::Error;
use torpor::{kube, log, KubeRequest, Level, Outcome, Request};

torpor::operator!(r#"{"for": {"resource": "example.com/v1/widgets"}, "sdk": "rust/0.1.0"}"#, reconcile);

/// Set when built, so that copies differ.
const BUILD: &str = match option_env!("MIRROR_BUILD") {
    Some(build) => build,
    None => "rust",
};

#[derive(Deserialize)]
struct Settings {
    config: Config,
}

#[derive(Deserialize)]
#[serde(default)]
struct Config {
    suffix: String,
    resource: String,
}

impl Default for Config {
    fn default() -> Self {
        Self { suffix: "mirror".into(), resource: "widgets".into() }
    }
}

#[derive(Deserialize)]
struct Primary {
    #[serde(default)]
    spec: Spec,
}

#[derive(Deserialize, Default)]
struct Spec {
    #[serde(default)]
    value: String,
}

fn reconcile(request: &Request) -> Result<Outcome, Box<dyn Error>> {
    let Config { suffix, resource } = serde_json::from_slice::<Settings>(&torpor::config()?)?.config;
    let (namespace, name) = (&request.namespace, &request.name);
    let primary = kube(&KubeRequest::get(&format!("/apis/example.com/v1/namespaces/{namespace}/{resource}/{name}")))?;
    let copy = format!("{name}-{suffix}");
    let path = format!("/api/v1/namespaces/{namespace}/configmaps/{copy}");
    match primary.status {
        404 => return expect(kube(&KubeRequest::new("DELETE", &path, b""))?, &[200, 202, 404]),
        200 => {}
        status => return Err(format!("reading {name}: {status}").into()),
    }
    let object: Primary = serde_json::from_slice(&primary.body)?;
    let config_map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": copy},
        "data": {"value": object.spec.value, "by": "rust", "build": BUILD},
    });
    let body = serde_json::to_vec(&config_map)?;
    expect(kube(&KubeRequest::apply(&format!("{path}?fieldManager=mirror&force=true"), &body))?, &[200, 201])
}

fn expect(response: torpor::Response, statuses: &[u16]) -> Result<Outcome, Box<dyn Error>> {
    if statuses.contains(&response.status) {
        return Ok(Outcome::Done);
    }
    log(Level::Error, &String::from_utf8_lossy(&response.body));
    Err(format!("the API server answered {}", response.status).into())
}
