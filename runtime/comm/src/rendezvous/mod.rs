//! Rendezvous of the processes of a job.
//!
//! Rank 0 listens; all others connect, prove that they know the job's [secret](super::secret), and state their plan;
//! rank 0 distributes the shared information. The connections stay open, so that all others notice immediately when a
//! process ends, even while their GPUs wait. `meet` establishes the job, `watch` monitors it, `wire` defines the
//! messages.

mod meet;
#[cfg(test)]
mod tests;
mod watch;
mod wire;

use super::CommError;
use super::secret::Secret;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use wire::{DONE, FAILED, SHARE, lost, receive, transmit};

type Result<T = ()> = std::result::Result<T, CommError>;

fn fail<T>(message: String) -> Result<T> {
    Err(message.into())
}

/// One process's connections to the others.
pub struct Rendezvous {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    /// The secret of the job.
    secret: Secret,
    /// On rank 0 the connections to all others, by rank; on others the one to rank 0.
    peers: Vec<(usize, TcpStream)>,
    failure: Arc<Mutex<Option<String>>>,
    /// Number of others that have reported that they are done.
    done: Arc<AtomicUsize>,
    /// Messages that rank 0 shared since monitoring began.
    inbox: Arc<(Mutex<VecDeque<Vec<u8>>>, Condvar)>,
    watched: AtomicBool,
    /// Numbers received from the others and not yet compared, by position in `peers`.
    numbers: Arc<(Mutex<Vec<VecDeque<u64>>>, Condvar)>,
}

impl Rendezvous {
    /// This process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The secret of the job.
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Broadcasts rank 0's bytes.
    ///
    /// # Errors
    /// If a process ended, or did not answer in time.
    pub fn share(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if self.rank == 0 {
            for i in 0..self.peers.len() {
                self.send(i, SHARE, &bytes)?;
            }
            return Ok(bytes);
        }
        if self.watched.load(Ordering::Acquire) {
            return self.heard();
        }
        let stream = &self.peers[0].1;
        let answer = stream.set_read_timeout(Some(self.timeout)).and_then(|()| receive(stream));
        match answer {
            Ok((SHARE, bytes)) => Ok(bytes),
            Ok((FAILED, reason)) => fail(String::from_utf8_lossy(&reason).into_owned()),
            Ok(_) => fail("rank 0 sent an unexpected message".into()),
            Err(e) => fail(lost(0, &e, self.timeout)),
        }
    }

    /// Gives every process the bytes of all, by rank; before monitoring begins.
    ///
    /// # Errors
    /// If a process ended, or did not answer in time.
    pub fn all(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut packed = Vec::new();
        let mut pack = |bytes: &[u8]| {
            packed.extend((bytes.len() as u32).to_le_bytes());
            packed.extend(bytes);
        };
        if self.rank > 0 {
            self.send(0, SHARE, own)?;
        } else {
            pack(own);
            for (rank, stream) in &self.peers {
                let answer =
                    stream.set_read_timeout(Some(self.timeout)).and_then(|()| receive(stream));
                match answer {
                    Ok((SHARE, bytes)) => pack(&bytes),
                    Ok((FAILED, reason)) => {
                        return fail(String::from_utf8_lossy(&reason).into_owned());
                    }
                    Ok(_) => return fail(format!("rank {rank} sent an unexpected message")),
                    Err(e) => return fail(lost(*rank, &e, self.timeout)),
                }
            }
        }
        let packed = self.share(packed)?;
        let (mut rest, mut all) = (&packed[..], Vec::new());
        while let Some((length, bytes)) = rest.split_first_chunk::<4>() {
            let length = (u32::from_le_bytes(*length) as usize).min(bytes.len());
            let (one, others) = bytes.split_at(length);
            all.push(one.to_vec());
            rest = others;
        }
        match all.len() == self.world_size {
            true => Ok(all),
            false => fail("rank 0 sent an unexpected message".into()),
        }
    }

    /// The address at which the others reach this process.
    pub fn address(&self) -> IpAddr {
        let addresses: Vec<IpAddr> =
            self.peers.iter().filter_map(|(_, s)| Some(s.local_addr().ok()?.ip())).collect();
        // Processes on this machine may have connected through the loopback address; others have not.
        let outside = addresses.iter().find(|a| !a.is_loopback()).or(addresses.first());
        outside.copied().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }

    fn send(&self, peer: usize, kind: u8, bytes: &[u8]) -> Result {
        let (rank, stream) = &self.peers[peer];
        transmit(stream, kind, bytes).map_err(|e| CommError::from(lost(*rank, &e, self.timeout)))
    }

    /// The failure of another process, if any.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reports that this process is done, and waits until all others are; they must be monitored. A process whose
    /// connections close without this has failed.
    ///
    /// # Errors
    /// If another process fails, or is not done in time.
    pub fn finish(&self) -> Result {
        // Rank 0 reports last: a rank that receives it may exit.
        if self.rank != 0 {
            self.send(0, DONE, &[])?;
        }
        let end = Instant::now() + self.timeout;
        while self.done.load(Ordering::Acquire) < self.peers.len() {
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let seconds = self.timeout.as_secs_f64();
                return fail(format!("not every rank finished within {seconds} s"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.rank == 0 {
            for i in 0..self.peers.len() {
                self.send(i, DONE, &[])?;
            }
        }
        Ok(())
    }

    /// Tells the others that this process cannot continue.
    pub fn fail(&self, reason: &str) {
        let mut noted = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.is_none() {
            *noted = Some(reason.into());
            for (_, stream) in &self.peers {
                // A process that has ended need not be told.
                let _ = transmit(stream, FAILED, reason.as_bytes());
            }
        }
    }
}
