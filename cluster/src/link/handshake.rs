//! The first words on a link: both ends say hello, and a wrong one is told why before it is shut out.
//!
//! Called by the dialler and the listener inside their own time limits. Bounds: one hello within
//! [`limits::HANDSHAKE_TIME_MAX`].

use bytes::BytesMut;
use starling_ids::Metric;
use thiserror::Error;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use crate::{
    security::{Connection, Tls, TlsError},
    wire::{Closing, Decoder, Frame, Hello, Party, WireError, encode, limits, settle},
};

/// A connection on which both ends have said hello.
pub(crate) struct Established {
    pub(crate) connection: Connection,
    /// Holds what came after the hello.
    pub(crate) decoder: Decoder,
    pub(crate) peer: Hello,
    /// Whether this side dialled.
    pub(crate) dialled: bool,
}

/// Why a link did not come about.
#[derive(Debug, Error)]
pub(crate) enum HandshakeError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the connection ended in the hello: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("no hello within {:?}", limits::HANDSHAKE_TIME_MAX)]
    Timeout,
    #[error("the node was declared down, or is elsewhere now")]
    Gone,
    #[error("refused by the other side: {0:?}")]
    Refused(Closing),
    #[error("refused: {0:?}")]
    Refuse(Closing),
    #[error("another frame came instead of a hello")]
    NotHello,
}

/// The dialler's part: speak first.
pub(crate) async fn greet(mut connection: Connection, ours: &Hello) -> Result<Established, HandshakeError> {
    let exchange = async {
        let mut decoder = Decoder::default();
        say(&mut connection, &Frame::Hello(Box::new(ours.clone()))).await?;
        let peer = hear(&mut connection, &mut decoder).await?;
        settle(ours, &peer).map_err(|why| HandshakeError::Refuse(Closing::Refused(why)))?;
        Ok::<_, HandshakeError>((decoder, peer))
    };
    let (decoder, peer) =
        timeout(limits::HANDSHAKE_TIME_MAX, exchange).await.map_err(|_| HandshakeError::Timeout)??;
    Ok(Established { connection, decoder, peer, dialled: true })
}

/// The acceptor's part: listen, check, answer. `admit` adds what only the directory knows.
pub(crate) async fn answer(
    mut connection: Connection,
    (tls, ours): (&Tls, &Hello),
    admit: impl Fn(&Hello) -> Result<(), Closing>,
) -> Result<Established, HandshakeError> {
    let exchange = async {
        let mut decoder = Decoder::default();
        let peer = hear(&mut connection, &mut decoder).await?;
        if let Err(why) = check(tls, &connection, ours, &peer).and_then(|()| admit(&peer)) {
            if matches!(why, Closing::Stale { .. }) {
                metrics::counter!(Metric::StaleRefused.name(), "what" => "link").increment(1);
            }
            say(&mut connection, &Frame::Goodbye(why.clone())).await?;
            connection.shutdown().await?;
            return Err(HandshakeError::Refuse(why));
        }
        say(&mut connection, &Frame::Hello(Box::new(ours.clone()))).await?;
        Ok::<_, HandshakeError>((decoder, peer))
    };
    let (decoder, peer) =
        timeout(limits::HANDSHAKE_TIME_MAX, exchange).await.map_err(|_| HandshakeError::Timeout)??;
    Ok(Established { connection, decoder, peer, dialled: false })
}

fn check(tls: &Tls, connection: &Connection, ours: &Hello, peer: &Hello) -> Result<(), Closing> {
    settle(ours, peer).map_err(Closing::Refused)?;
    if peer.party == Party::Node && !tls.is_node(connection, &peer.node) {
        return Err(Closing::Refused(format!("the certificate is not one of node {}", peer.node)));
    }
    if peer.party == Party::Node && peer.node == ours.node {
        return Err(Closing::Refused(format!("this node is called {} too", peer.node)));
    }
    match &peer.wanted {
        Some((node, _)) if *node != ours.node => {
            Err(Closing::Refused(format!("this is node {}, not {node}", ours.node)))
        }
        Some((_, incarnation)) if *incarnation != ours.incarnation => Err(Closing::Stale { current: ours.incarnation }),
        _ => Ok(()),
    }
}

async fn say(connection: &mut Connection, frame: &Frame) -> std::io::Result<()> {
    let mut bytes = BytesMut::new();
    encode(frame, &mut bytes);
    connection.write_all(&bytes).await?;
    connection.flush().await
}

async fn hear(connection: &mut Connection, decoder: &mut Decoder) -> Result<Hello, HandshakeError> {
    loop {
        match decoder.decode()? {
            Some(Frame::Hello(hello)) => return Ok(*hello),
            Some(Frame::Goodbye(why)) => return Err(HandshakeError::Refused(why)),
            Some(_) => return Err(HandshakeError::NotHello),
            None => {
                if connection.read_buf(decoder.buffer()).await? == 0 {
                    return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
                }
            }
        }
    }
}
