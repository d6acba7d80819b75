//! Times what is enqueued on a stream, directly and from a graph.

use crate::RunError;
use frit_cuda::CudaError;
use frit_cuda::driver::{Driver, EventHandle, StreamHandle};

/// Measured runs; the fastest counts.
const RUNS: usize = 5;
/// Work whose first run takes so many times as long as the best is not run again.
const HOPELESS: f64 = 2.0;

/// What measuring needs.
pub(super) struct Bench<'a, D, W> {
    pub(super) driver: &'a D,
    /// Where everything runs.
    pub(super) on: StreamHandle,
    events: [EventHandle; 2],
    /// Makes the host wait for an event.
    wait: W,
}

/// Microseconds, or why the work itself failed as it was enqueued.
type Time = Result<f64, CudaError>;

impl<'a, D: Driver, W: Fn(EventHandle) -> Result<(), RunError>> Bench<'a, D, W> {
    /// A bench on a stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn new(driver: &'a D, on: StreamHandle, wait: W) -> Result<Self, CudaError> {
        let events = [driver.create_event(true)?, driver.create_event(true)?];
        Ok(Bench { driver, on, events, wait })
    }

    /// Waits until everything that was enqueued is done.
    ///
    /// # Errors
    /// What failed meanwhile.
    pub(super) fn finish(&self) -> Result<(), RunError> {
        self.driver.record(self.events[0], self.on)?;
        (self.wait)(self.events[0])
    }

    /// Microseconds of the fastest of several runs after one that is not measured; of one run, if that took much longer
    /// than `best`.
    ///
    /// # Errors
    /// A call that failed.
    pub(super) fn time(
        &self,
        run: impl Fn() -> Result<(), CudaError>,
        best: f64,
    ) -> Result<Time, RunError> {
        let [begin, end] = self.events;
        let mut least = f64::INFINITY;
        for i in 0..=RUNS {
            self.driver.record(begin, self.on)?;
            if let Err(e) = run() {
                return Ok(Err(e));
            }
            self.driver.record(end, self.on)?;
            (self.wait)(end)?;
            if i > 0 {
                least = least.min(self.driver.elapsed_us(begin, end)?);
            }
            if least.is_finite() && least > HOPELESS * best {
                break;
            }
        }
        Ok(Ok(least))
    }

    /// The same of work as it runs in a step: from a graph. It was run before.
    ///
    /// # Errors
    /// A call that failed.
    pub(super) fn time_captured(
        &self,
        run: impl Fn() -> Result<(), CudaError>,
    ) -> Result<Time, RunError> {
        let driver = self.driver;
        driver.begin_capture(self.on)?;
        let issued = run();
        // A capture must be ended whatever became of it.
        let captured = driver.end_capture(self.on);
        let graph = match issued.and(captured) {
            Ok(graph) => graph,
            Err(e) => return Ok(Err(e)),
        };
        let time = self.time(|| driver.launch_graph(graph, self.on), f64::INFINITY);
        driver.destroy_graph(graph)?;
        time
    }
}
