//! Where an actor shows its face to streams, and where its successor takes over.
//!
//! An endpoint is registered once; the actor behind it comes and goes. Its state holds the [`Seated`] guard, so
//! however it dies the seat is empty at that moment and streams are refused as unavailable instead of waiting.

use std::sync::Arc;

use arc_swap::ArcSwapOption;

/// A place for one living actor's face.
#[derive(Debug)]
pub(crate) struct Seat<T> {
    face: ArcSwapOption<T>,
}

impl<T> Default for Seat<T> {
    fn default() -> Self {
        Self { face: ArcSwapOption::empty() }
    }
}

impl<T> Seat<T> {
    /// The face of the actor that lives now.
    pub(crate) fn now(&self) -> Option<Arc<T>> {
        self.face.load_full()
    }

    /// Shows a face until the guard is dropped or a successor shows its own.
    pub(crate) fn sit(self: &Arc<Self>, face: Arc<T>) -> Seated<T> {
        self.face.store(Some(face.clone()));
        Seated { seat: self.clone(), face }
    }
}

/// Empties the seat when dropped, unless a successor sits there.
#[derive(Debug)]
pub(crate) struct Seated<T> {
    seat: Arc<Seat<T>>,
    face: Arc<T>,
}

impl<T> Drop for Seated<T> {
    fn drop(&mut self) {
        let own = Some(self.face.clone());
        self.seat.face.compare_and_swap(&own, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_leaver_does_not_unseat_its_successor() {
        let seat = Arc::new(Seat::default());
        let first = seat.sit(Arc::new(1));
        let second = seat.sit(Arc::new(2));
        drop(first);
        assert_eq!(seat.now().as_deref(), Some(&2));
        drop(second);
        assert_eq!(seat.now(), None);
    }
}
