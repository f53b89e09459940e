//! Handshakes between holders of one key, of rings that share a key, and of strangers.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::*;
use crate::security::ClusterKey;

fn name(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

async fn meet(
    server: &Tls,
    client: &Tls,
    expected: Option<&NodeId>,
) -> (Result<(Connection, Alpn), TlsError>, Result<Connection, TlsError>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accept = async { server.accept(listener.accept().await.unwrap().0).await };
    let connect = async {
        let mut connection = client.connect(address, expected, Alpn::Session, Duration::from_secs(5)).await?;
        // In TLS 1.3 a refused client learns of it only when it reads.
        connection.write_all(b"x").await.map_err(TlsError::Handshake)?;
        connection.read_u8().await.map_err(TlsError::Handshake)?;
        Ok(connection)
    };
    let accept = async {
        let mut accepted = accept.await?;
        accepted.0.read_u8().await.map_err(TlsError::Handshake)?;
        accepted.0.write_all(b"y").await.map_err(TlsError::Handshake)?;
        Ok(accepted)
    };
    tokio::join!(accept, connect)
}

#[tokio::test]
async fn holders_of_one_key_meet_and_know_their_names() {
    let key = ClusterKey::generate();
    let (a, b) = (name("a._-odd"), name("b"));
    let (server, client) = (Tls::new(&key, &a).unwrap(), Tls::new(&key, &b).unwrap());
    for expected in [Some(&a), None] {
        let (accepted, connected) = meet(&server, &client, expected).await;
        let (accepted, alpn) = accepted.unwrap();
        assert_eq!(alpn, Alpn::Session);
        assert!(server.is_node(&accepted, &b) && !server.is_node(&accepted, &a));
        assert!(client.is_node(&connected.unwrap(), &a));
    }
}

#[tokio::test]
async fn another_key_or_another_node_is_refused_on_both_sides() {
    let key = ClusterKey::generate();
    let server = Tls::new(&key, &name("a")).unwrap();
    let stranger = Tls::new(&ClusterKey::generate(), &name("b")).unwrap();
    let (accepted, connected) = meet(&server, &stranger, None).await;
    assert!(accepted.is_err() && connected.is_err());
    let friend = Tls::new(&key, &name("b")).unwrap();
    let (accepted, connected) = meet(&server, &friend, Some(&name("c"))).await;
    assert!(accepted.is_err());
    assert!(matches!(connected, Err(TlsError::Handshake(_))));
}

#[tokio::test]
async fn rings_that_share_any_key_meet_and_others_are_told_why_not() {
    let (old, new, stranger) = (ClusterKey::generate(), ClusterKey::generate(), ClusterKey::generate());
    let only_old = KeyRing::from(&old);
    let added = only_old.add(new.clone()).unwrap();
    let used = added.promote(new.id()).unwrap();
    let only_new = used.remove(old.id()).unwrap();
    let (a, b) = (name("a"), name("b"));
    for (one, other, by) in [
        (&only_old, &added, [&old, &old]),
        (&only_old, &used, [&old, &old]),
        (&used, &added, [&new, &old]),
        (&used, &only_new, [&new, &new]),
        (&KeyRing::from(&new), &used, [&new, &new]),
    ] {
        for (server, client, keys) in [(one, other, by), (other, one, [by[1], by[0]])] {
            let (server, client) = (Tls::new(server, &a).unwrap(), Tls::new(client, &b).unwrap());
            let (accepted, connected) = meet(&server, &client, Some(&a)).await;
            let (accepted, connected) = (accepted.unwrap().0, connected.unwrap());
            assert_eq!(client.key_of(&connected), Some(keys[0].id()), "what the server has shown");
            assert_eq!(server.key_of(&accepted), Some(keys[1].id()), "what the client has shown");
            assert!(server.is_node(&accepted, &b) && client.is_node(&connected, &a));
        }
    }
    for (server, client) in [(&only_new, &only_old), (&only_old, &only_new), (&used, &KeyRing::from(stranger))] {
        let (server, client) = (Tls::new(server, &a).unwrap(), Tls::new(client, &b).unwrap());
        let (accepted, connected) = meet(&server, &client, None).await;
        assert!(accepted.is_err());
        let error = connected.unwrap_err();
        assert!(matches!(error, TlsError::NoSharedKey(_)), "{error}");
    }
}

#[tokio::test]
async fn a_switch_changes_new_handshakes_and_a_removal_is_told_to_old_connections() {
    let (old, new) = (ClusterKey::generate(), ClusterKey::generate());
    let (server_keys, client_keys) = (Keys::from(&old), Keys::from(&old));
    let (a, b) = (name("a"), name("b"));
    let (server, client) = (Tls::new(&server_keys, &a).unwrap(), Tls::new(&client_keys, &b).unwrap());
    let (accepted, connected) = meet(&server, &client, None).await;
    let (mut early_accepted, mut early_connected) = (accepted.unwrap().0, connected.unwrap());
    let mut removed = Box::pin(server.removed(&early_accepted));
    for keys in [&server_keys, &client_keys] {
        keys.change(|ring| ring.add(new.clone())).unwrap();
        keys.change(|ring| ring.promote(new.id())).unwrap();
    }
    let (accepted, connected) = meet(&server, &client, Some(&a)).await;
    assert_eq!(server.key_of(&accepted.unwrap().0), Some(new.id()));
    assert_eq!(client.key_of(&connected.unwrap()), Some(new.id()));
    assert_eq!(server.generation().unwrap(), 0);
    assert_eq!(server.key_of(&early_accepted), Some(old.id()));
    assert!(futures::poll!(&mut removed).is_pending());
    server_keys.change(|ring| ring.remove(old.id())).unwrap();
    removed.await;
    server.removed(&early_accepted).await;
    assert_eq!((server.generation().unwrap(), client.generation().unwrap()), (1, 0));
    assert_eq!(server.key_of(&early_accepted), None);
    // Whether to close it is the owner's choice: TLS itself goes on.
    early_accepted.write_all(b"z").await.unwrap();
    assert_eq!(early_connected.read_u8().await.unwrap(), b'z');
    let (accepted, connected) = meet(&server, &client, Some(&a)).await;
    assert!(accepted.is_ok() && connected.is_ok());
}

#[tokio::test]
async fn nothing_in_the_clear_names_a_node() {
    let key = ClusterKey::generate();
    let client = Tls::new(&key, &name("the-dialer")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let dialled = name("the-dialled");
    let dial = client.connect(address, Some(&dialled), Alpn::Link, Duration::from_secs(5));
    let read = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = vec![0; 4096];
        let length = stream.read(&mut hello).await.unwrap();
        hello.truncate(length);
        hello
    };
    let (outcome, hello) = tokio::join!(dial, read);
    assert!(outcome.is_err());
    let within = |what: &str| hello.windows(what.len()).any(|window| window == what.as_bytes());
    assert!(within("starling-link/1") && within(&key.id().to_string()), "what it says in the clear");
    let hashed = local_name(&dialled);
    for name in ["dialer", "dialled", hashed.split('.').next().unwrap(), ANY_NODE] {
        assert!(!within(name), "{name}");
    }
}

fn resumed(connection: &Connection) -> bool {
    connection.get_ref().1.handshake_kind() == Some(rustls::HandshakeKind::Resumed)
}

#[tokio::test]
async fn a_second_connection_resumes_and_still_proves_both_names() {
    let key = ClusterKey::generate();
    let (a, b) = (name("a"), name("b"));
    let (server, client) = (Tls::new(&key, &a).unwrap(), Tls::new(&key, &b).unwrap());
    for turn in 0..4 {
        let (accepted, connected) = meet(&server, &client, Some(&a)).await;
        let (accepted, connected) = (accepted.unwrap().0, connected.unwrap());
        assert_eq!((resumed(&accepted), resumed(&connected)), (turn > 0, turn > 0), "{turn}");
        assert!(server.is_node(&accepted, &b) && !server.is_node(&accepted, &a));
        assert!(client.is_node(&connected, &a) && !client.is_node(&connected, &b));
    }
    // A ticket of one name does not help to dial another one.
    assert!(meet(&server, &client, Some(&name("c"))).await.1.is_err());
    // Nobody else has the ticket, and a process that starts again has none.
    let other = Tls::new(&key, &b).unwrap();
    let (accepted, _) = meet(&server, &other, Some(&a)).await;
    assert!(!resumed(&accepted.unwrap().0));
}

#[tokio::test]
async fn tickets_die_with_the_configuration_that_gave_them() {
    let (old, new) = (ClusterKey::generate(), ClusterKey::generate());
    let (a, b) = (name("a"), name("b"));
    let client = Tls::new(&old, &b).unwrap();
    meet(&Tls::new(&old, &a).unwrap(), &client, Some(&a)).await.1.unwrap();
    // The same name and key, made anew: not resumed, but met.
    let (accepted, connected) = meet(&Tls::new(&old, &a).unwrap(), &client, Some(&a)).await;
    assert!(!resumed(&accepted.unwrap().0) && !resumed(&connected.unwrap()));
    // The key is gone: the ticket that was given under it opens nothing.
    let (accepted, connected) = meet(&Tls::new(&new, &a).unwrap(), &client, Some(&a)).await;
    assert!(accepted.is_err() && connected.is_err());
}
