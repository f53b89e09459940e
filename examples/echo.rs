//! An echo service and its caller.
//!
//! ```console
//! $ cargo run --example echo -- serve
//! ready 127.0.0.1:41234
//! $ cargo run --example echo -- say 127.0.0.1:41234 "hello out there"
//! hello out there
//! ```
#![allow(clippy::print_stdout)] // an example talks to a person

use std::{error::Error, time::Duration};

use starling::{Endpoint, JoinConfig, Mesh};

/// The contract that both sides share: a name, the type of a request, the type of an answer.
fn echo(mesh: &Mesh) -> Result<Endpoint<String, String>, Box<dyn Error>> {
    Ok(mesh.namespace("examples")?.component("echo")?.endpoint("say")?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // One key file for all: whoever starts first makes it.
    let config = |name: &str| JoinConfig::new(name).key_file_or_new("cluster.key");
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => {
            let mesh = Mesh::join(config("echo").bind("127.0.0.1:0".parse()?)).await?;
            let _served = echo(&mesh)?.serve(|text| async move { Ok(text) })?;
            println!("ready {}", mesh.address());
            println!("ended: {}", mesh.failed().await);
        }
        ["say", seed, text] => {
            let mesh = Mesh::join(config("caller").seed(seed)).await?;
            let client = echo(&mesh)?.client();
            if !client.wait_for(1, Duration::from_secs(10)).await {
                return Err("no echo in this cluster".into());
            }
            println!("{}", client.unary(&text.to_owned()).await?);
            mesh.leave().await;
        }
        _ => return Err("usage: echo serve | echo say HOST:PORT TEXT".into()),
    }
    Ok(())
}
