//! Shell: the serving side of a process: its regions, its grants, its door, and whether it still runs.
//!
//! Owned by the fabric; read by every serving path. The table of hosts in this process is what `mem` connects through.
//! Bounds: `REGIONS_MAX` regions; regions stay registered until the host ends, because peers name them by number.

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    batch::{Direction, RegionId},
    descriptor::HostId,
    error::{Refusal, TransferError},
    grant::{Ask, Grant, GrantToken, Grants, Use},
    region::Region,
    wait::{Bounds, Kick},
};

/// Regions of one host at most.
pub const REGIONS_MAX: usize = 256;
/// The region that a peer may read with the door token alone, to measure the way.
pub const PROBE: RegionId = RegionId(u32::MAX);
/// Bytes of the probe region.
pub const PROBE_BYTES: usize = 1 << 20;

static HOSTS: LazyLock<Mutex<HashMap<u128, Weak<Host>>>> = LazyLock::new(Mutex::default);

/// One data plane's serving side.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) id: HostId,
    pub(crate) door: GrantToken,
    pub(crate) grants: Arc<Grants>,
    pub(crate) stop: Stop,
    regions: RwLock<Vec<Region>>,
    probe: Region,
}

/// Ends all threads of a host.
#[derive(Debug)]
pub(crate) struct Stop {
    kick: Kick,
    stopped: AtomicBool,
}

impl Stop {
    pub(crate) fn now(&self) {
        self.stopped.store(true, Ordering::Release);
        self.kick.now();
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Bounds of a wait that ends with the host, at the latest after `within`.
    pub(crate) fn bounds(&self, within: Option<Duration>) -> Serving<'_> {
        Serving { stop: self, until: within.map(|within| Instant::now() + within), soon: false }
    }
}

/// See [`Stop::bounds`].
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    stop: &'a Stop,
    until: Option<Instant>,
    soon: bool,
}

impl Serving<'_> {
    /// The same, where what is waited for is likely to come in a moment.
    pub(crate) fn soon(self) -> Self {
        Self { soon: true, ..self }
    }
}

impl Bounds for Serving<'_> {
    fn kick(&self) -> &Kick {
        &self.stop.kick
    }

    fn until(&self) -> Option<Instant> {
        self.until
    }

    fn halted(&self) -> Result<(), TransferError> {
        if self.stop.stopped() {
            return Err(TransferError::Cancelled);
        }
        if self.until.is_some_and(|until| Instant::now() >= until) { Err(TransferError::Timeout) } else { Ok(()) }
    }

    fn soon(&self) -> bool {
        self.soon
    }
}

fn hosts() -> MutexGuard<'static, HashMap<u128, Weak<Host>>> {
    HOSTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// A host without regions, which this process's other hosts can find.
    pub(crate) fn start(id: HostId, door: GrantToken) -> Result<Arc<Self>, TransferError> {
        let probe = Region::shared("starling-kv-probe", PROBE_BYTES)?;
        probe.populate()?;
        let grants = Arc::new(Grants::new());
        let (direction, ranges) = (Direction::Pull, std::iter::once(0..PROBE_BYTES as u64).collect());
        let century = Duration::from_secs(100 * 365 * 86_400);
        grants.issue(Grant { token: door, direction, region: PROBE, ranges, expires: Instant::now() + century })?;
        let stop = Stop { kick: Kick::new()?, stopped: AtomicBool::new(false) };
        let host = Arc::new(Self { id, door, grants, stop, regions: RwLock::default(), probe });
        let mut hosts = hosts();
        hosts.retain(|_, host| host.strong_count() > 0);
        hosts.insert(id.0, Arc::downgrade(&host));
        Ok(host)
    }

    /// A host of this process that still runs.
    pub(crate) fn find(id: HostId) -> Option<Arc<Self>> {
        hosts().get(&id.0).and_then(Weak::upgrade).filter(|host| !host.stop.stopped())
    }

    /// Adds a region.
    pub(crate) fn register(&self, region: &Region) -> Result<RegionId, TransferError> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        if regions.len() >= REGIONS_MAX {
            return Err(Refusal::Busy.into());
        }
        regions.push(region.clone());
        Ok(RegionId(regions.len() as u32 - 1))
    }

    /// A region by its number.
    pub(crate) fn region(&self, id: RegionId) -> Option<Region> {
        if id == PROBE {
            return Some(self.probe.clone());
        }
        self.regions.read().unwrap_or_else(PoisonError::into_inner).get(id.0 as usize).cloned()
    }

    /// The one gate for every transport: the region and a use of the grant, or why not.
    pub(crate) fn admit(&self, ask: Ask, pages: &[(u64, u32)]) -> Result<(Region, Use), Refusal> {
        let granted = self.grants.admit(ask, pages.iter().copied(), Instant::now())?;
        let region = self.region(ask.region).ok_or(Refusal::NoRegion)?;
        match pages.iter().position(|(at, len)| !region.holds(*at, u64::from(*len))) {
            Some(page) => Err(Refusal::NotGranted { page: u32::try_from(page).unwrap_or(u32::MAX) }),
            None => Ok((region, granted)),
        }
    }
}
