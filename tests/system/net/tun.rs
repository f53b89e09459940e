//! Opens a network device whose other side is this process: packets sent to it are read here, packets written here
//! arrive at it. It is gone when the file is closed, however the process ends.

use std::{fs::File, io, os::unix::fs::OpenOptionsExt};

use rustix::ioctl::{Opcode, Setter, ioctl};

/// `TUNSETIFF` of linux/if_tun.h.
const SET_INTERFACE: Opcode = 0x4004_54ca;
/// Packets without Ethernet and without a lead-in: `IFF_TUN | IFF_NO_PI`.
const FLAGS: u16 = 0x1001;
/// `O_NONBLOCK`.
const NON_BLOCKING: i32 = 0o4000;

/// `struct ifreq` of linux/if.h, as far as this call uses it.
#[derive(Debug)]
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// A new device of this name, in the network of this process.
pub(crate) fn open(name: &str) -> io::Result<File> {
    let file = File::options().read(true).write(true).custom_flags(NON_BLOCKING).open("/dev/net/tun")?;
    let mut request = InterfaceRequest { name: [0; 16], flags: FLAGS, rest: [0; 22] };
    let Some(place) = request.name[..15].get_mut(..name.len()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a device name has at most 15 bytes"));
    };
    place.copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads a `struct ifreq` (40 bytes), and `InterfaceRequest` has its size and layout; it changes
    // nothing but the state behind this file descriptor.
    unsafe { ioctl(&file, Setter::<SET_INTERFACE, InterfaceRequest>::new(request)) }?;
    Ok(file)
}
