//! Memory of mapped files.

use memmap2::Mmap;

/// Gives back the memory of a map that will hardly be read again; a read brings its pages back.
pub(crate) fn release(map: &Mmap) {
    #[cfg(unix)]
    // SAFETY: nothing is written to the map, so that its pages are those of the file. That the system declines does no harm.
    let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    #[cfg(not(unix))]
    let _ = map;
}
