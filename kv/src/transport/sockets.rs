//! Shell: sockets of the data plane: options, connecting with a deadline, passing descriptors, who is at the other end.
//!
//! Called by sessions and by the serving side.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::SocketAddr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as LocalAddr, UnixListener},
    },
    time::Duration,
};

use rustix::{
    event::PollFlags,
    io::{Errno, ioctl_fionbio},
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
        sockopt,
    },
};

use super::{
    descriptor::HostId,
    error::TransferError,
    proto::ANSWER,
    wait::{Bounds, ready, receive},
};

/// What the kernel may hold of one connection's bytes; it grants what its own limit allows.
const BUFFER: usize = 4 << 20;
/// A peer whose kernel says nothing for this long is gone.
const SILENT: Duration = Duration::from_secs(10);

/// Non-blocking, large buffers, no Nagle, keepalive.
pub(crate) fn tune(fd: BorrowedFd<'_>) -> Result<(), TransferError> {
    ioctl_fionbio(fd, true)?;
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_send_buffer_size(fd, BUFFER)?;
    sockopt::set_socket_recv_buffer_size(fd, BUFFER)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, SILENT / 2)?;
    sockopt::set_tcp_keepintvl(fd, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(fd, 5)?;
    sockopt::set_tcp_user_timeout(fd, SILENT.as_millis() as u32)?;
    Ok(())
}

/// A tuned TCP connection.
pub(crate) fn dial(to: SocketAddr, bounds: &impl Bounds) -> Result<OwnedFd, TransferError> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = net::socket_with(family, SocketType::STREAM, flags, None)?;
    tune(fd.as_fd())?;
    connected(net::connect(&fd, &to), fd, bounds)
}

/// A connection to a host on this machine.
pub(crate) fn dial_local(name: &str, bounds: &impl Bounds) -> Result<OwnedFd, TransferError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = net::SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    connected(net::connect(&fd, &address), fd, bounds)
}

fn connected(begun: rustix::io::Result<()>, fd: OwnedFd, bounds: &impl Bounds) -> Result<OwnedFd, TransferError> {
    let unreachable = |error: Errno| TransferError::Unreachable(error.to_string());
    match begun {
        Ok(()) => return Ok(fd),
        Err(Errno::INPROGRESS | Errno::AGAIN) => {}
        Err(error) => return Err(unreachable(error)),
    }
    ready(fd.as_fd(), PollFlags::OUT, bounds)?;
    match sockopt::socket_error(&fd) {
        Ok(Ok(())) => Ok(fd),
        Ok(Err(error)) | Err(error) => Err(unreachable(error)),
    }
}

/// The name of a host's local socket. It lives in the kernel alone: nothing is left behind by a killed process.
pub(crate) fn local_name(host: HostId) -> String {
    format!("starling-kv-{:032x}", host.0)
}

/// Listens on it.
pub(crate) fn listen_local(name: &str) -> Result<UnixListener, TransferError> {
    let listener = UnixListener::bind_addr(&LocalAddr::from_abstract_name(name.as_bytes())?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Whether the process at the other end of a local socket runs as this user, or as root.
pub(crate) fn same_user(fd: BorrowedFd<'_>) -> bool {
    let ours = rustix::process::geteuid();
    sockopt::socket_peercred(fd).is_ok_and(|peer| peer.uid == ours || peer.uid.is_root())
}

/// Sends an answer with a descriptor.
pub(crate) fn send_with_fd(
    fd: BorrowedFd<'_>,
    bytes: &[u8; ANSWER],
    passed: BorrowedFd<'_>,
    bounds: &impl Bounds,
) -> Result<(), TransferError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let fds = [passed];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(net::SendAncillaryMessage::ScmRights(&fds));
        match net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            // An answer is smaller than any socket buffer: it goes whole or not at all.
            Ok(ANSWER) => return Ok(()),
            Ok(_) => return Err(TransferError::PeerGone),
            Err(Errno::AGAIN) => ready(fd, PollFlags::OUT, bounds)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Receives an answer and the descriptor that came with it, if any.
pub(crate) fn receive_with_fd(
    fd: BorrowedFd<'_>,
    bounds: &impl Bounds,
) -> Result<([u8; ANSWER], Option<OwnedFd>), TransferError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut bytes = [0; ANSWER];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = net::recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let got = match got {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN) => {
                ready(fd, PollFlags::IN, bounds)?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if got == 0 {
            return Err(TransferError::PeerGone);
        }
        let passed = control.drain().find_map(|message| match message {
            net::RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        receive(fd, &mut bytes[got..], bounds)?;
        return Ok((bytes, passed));
    }
}
