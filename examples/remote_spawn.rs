//! An actor started on another node, supervised there and followed from here: it dies, comes back, and is stopped.
//!
//! ```console
//! $ cargo run --example remote_spawn -- host
//! ready 127.0.0.1:41234
//! $ cargo run --example remote_spawn -- spawn 127.0.0.1:41234
//! ```
#![allow(clippy::print_stdout)] // an example talks to a person

use std::{error::Error, time::Duration};

use serde::{Deserialize, Serialize};
use starling::{Actor, Fault, JoinConfig, Mesh, NodeId};

/// An account; nobody can take out more than is in it.
struct Account {
    balance: i64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Put(i64),
    /// A fault in the program: the actor dies on it.
    Corrupt,
}

impl Actor for Account {
    type Request = Order;
    type Reply = i64;

    async fn handle(&mut self, order: Order) -> Result<i64, Fault> {
        match order {
            Order::Put(amount) => self.balance += amount,
            Order::Corrupt => panic!("this account is corrupt"),
        }
        Ok(self.balance)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // One key file for all: whoever starts first makes it.
    let config = |name: &str| JoinConfig::new(name).key_file_or_new("cluster.key");
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["host"] => {
            let mesh = Mesh::join(config("host").bind("127.0.0.1:0".parse()?)).await?;
            mesh.register_factory("account", |balance: i64| Ok(Account { balance }));
            println!("ready {}", mesh.address());
            println!("ended: {}", mesh.failed().await);
        }
        ["spawn", seed] => {
            let mesh = Mesh::join(config("teller").seed(seed)).await?;
            let host = NodeId::new("host")?;
            mesh.wait_for_node(&host, Duration::from_secs(10)).await?;

            let account = mesh.spawn_on::<Account>(&host, "account", &100).await?;
            let mut life = account.monitor();
            println!("{:?}", life.next().await);
            println!("balance {}", account.ask(&Order::Put(5)).await?);
            match account.ask(&Order::Corrupt).await {
                Ok(balance) => println!("balance {balance}"),
                Err(error) => println!("{error}"),
            }
            println!("{:?}", life.next().await);
            // A new life with the arguments of the first.
            println!("balance {}", account.ask(&Order::Put(1)).await?);
            account.stop().await?;
            println!("{:?}", life.next().await);
            mesh.leave().await;
        }
        _ => return Err("usage: remote_spawn host | remote_spawn spawn HOST:PORT".into()),
    }
    Ok(())
}
