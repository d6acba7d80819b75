//! Rank 0 listens, the others connect and say who they are and what they run.

use super::wire::{HELLO, receive, refuse};
use super::{Rendezvous, RendezvousError, Result, fail};
use crate::comm::launch::Launch;
use std::collections::VecDeque;
use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

impl Rendezvous {
    /// Finds the other processes. They must come within `timeout`, and run the plan with this hash.
    ///
    /// # Errors
    /// Who did not come, or runs something else.
    pub fn meet(launch: &Launch, plan_hash: &str, timeout: Duration) -> Result<Rendezvous> {
        let Some((host, port)) = &launch.master else {
            return fail("several processes need MASTER_ADDR and MASTER_PORT".into());
        };
        let mut meeting = Rendezvous {
            rank: launch.rank,
            world_size: launch.world_size,
            timeout,
            peers: Vec::new(),
            failure: Arc::default(),
            done: Arc::default(),
            inbox: Arc::default(),
            watched: AtomicBool::new(false),
            numbers: Arc::default(),
        };
        let end = Instant::now() + timeout;
        if launch.rank == 0 {
            meeting.peers = meeting.host(*port, plan_hash, end)?;
        } else {
            let stream = connect(host, *port, end).map_err(|e| {
                RendezvousError(format!("rank 0 does not answer at {host}:{port}: {e}"))
            })?;
            let hello = format!("{} {} {plan_hash}", launch.rank, launch.world_size);
            meeting.peers = vec![(0, stream)];
            meeting.send(0, HELLO, hello.as_bytes())?;
        }
        *meeting.numbers.0.lock().unwrap_or_else(PoisonError::into_inner) =
            vec![VecDeque::new(); meeting.peers.len()];
        // Rank 0 says to all at once that all are there.
        meeting.share(Vec::new())?;
        Ok(meeting)
    }

    /// Waits for all others.
    fn host(&self, port: u16, hash: &str, end: Instant) -> Result<Vec<(usize, TcpStream)>> {
        let listener = TcpListener::bind(("0.0.0.0", port))
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(|e| RendezvousError(format!("rank 0 cannot listen at port {port}: {e}")))?;
        let mut peers: Vec<(usize, TcpStream)> = Vec::new();
        while peers.len() + 1 < self.world_size {
            if Instant::now() >= end {
                let missing: Vec<String> = (1..self.world_size)
                    .filter(|r| peers.iter().all(|(p, _)| p != r))
                    .map(|r| r.to_string())
                    .collect();
                let seconds = self.timeout.as_secs_f64();
                let reason = format!("rank {} did not come within {seconds} s", missing.join(", "));
                refuse(&peers, &reason);
                return fail(reason);
            }
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            // A stranger that says nothing must not stop the meeting.
            let patience = Duration::from_secs(5).min(self.timeout);
            let hello = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(patience)))
                .and_then(|()| receive(&stream));
            let Ok((HELLO, hello)) = hello else { continue };
            match self.check_hello(&String::from_utf8_lossy(&hello), hash, &peers) {
                Ok(rank) => peers.push((rank, stream)),
                Err(error) => {
                    peers.push((usize::MAX, stream));
                    refuse(&peers, &error.0);
                    return Err(error);
                }
            }
        }
        peers.sort_by_key(|(rank, _)| *rank);
        Ok(peers)
    }

    fn check_hello(&self, hello: &str, hash: &str, peers: &[(usize, TcpStream)]) -> Result<usize> {
        let mut words = hello.split(' ');
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok());
        let (Some(rank), Some(world_size)) = (number(), number()) else {
            return fail(format!("a process said `{hello}`, which is no greeting"));
        };
        if world_size != self.world_size || rank == 0 || rank >= world_size {
            return fail(format!(
                "rank {rank} was started for {world_size} processes, rank 0 for {}",
                self.world_size
            ));
        }
        if peers.iter().any(|(r, _)| *r == rank) {
            return fail(format!("two processes were started as rank {rank}"));
        }
        if words.next() != Some(hash) {
            return fail(format!(
                "rank {rank} runs another plan, or other hyper-parameters, than rank 0; give every rank the same"
            ));
        }
        Ok(rank)
    }
}

/// Connects to rank 0, which may not listen yet.
fn connect(host: &str, port: u16, end: Instant) -> io::Result<TcpStream> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let tried = (host, port).to_socket_addrs().and_then(|mut addresses| {
            let address = addresses.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
            TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1)))
        });
        match tried {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) if left.is_zero() => return Err(e),
            // Rank 0 may not listen yet.
            Err(_) => std::thread::sleep(Duration::from_millis(50).min(left)),
        }
    }
}
