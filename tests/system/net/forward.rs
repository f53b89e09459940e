//! A port that passes everything on to another one, as a sidecar or a port mapping does: TCP and UDP.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use tokio::{
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
};

/// A forwarded port; it closes when this is dropped.
#[derive(Debug)]
pub(crate) struct Forward {
    pub(crate) address: SocketAddr,
    carried: Arc<(AtomicU64, AtomicU64)>,
    _tasks: JoinSet<()>,
}

impl Forward {
    /// A new port on loopback that leads to `to`.
    pub(crate) async fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let socket = UdpSocket::bind(address).await.unwrap();
        let carried: Arc<(AtomicU64, AtomicU64)> = Arc::default();
        let mut tasks = JoinSet::new();
        let counted = carried.clone();
        tasks.spawn(async move {
            let mut buffer = [0; 2048];
            while let Ok((length, _)) = socket.recv_from(&mut buffer).await {
                counted.1.fetch_add(1, Relaxed);
                if let Err(error) = socket.send_to(&buffer[..length], to).await {
                    eprintln!("a forwarded datagram was not sent: {error}");
                }
            }
        });
        let counted = carried.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut outside, _)) = listener.accept().await {
                counted.0.fetch_add(1, Relaxed);
                connections.spawn(async move {
                    let Ok(mut inside) = TcpStream::connect(to).await else { return };
                    if let Err(error) = tokio::io::copy_bidirectional(&mut outside, &mut inside).await {
                        eprintln!("a forwarded connection ended: {error}");
                    }
                });
            }
        });
        Self { address, carried, _tasks: tasks }
    }

    /// Connections and datagrams that came in.
    pub(crate) fn carried(&self) -> (u64, u64) {
        (self.carried.0.load(Relaxed), self.carried.1.load(Relaxed))
    }
}
