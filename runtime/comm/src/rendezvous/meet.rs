//! Establishes the job: rank 0 listens, the others connect and state their rank and identity.

use super::wire::refuse;
use super::{Rendezvous, Result, fail};
use crate::CommError;
use crate::door::{Door, enter};
use crate::identity::difference;
use crate::launch::Launch;
use crate::secret::{Secret, SecretSource};
use std::cell::Cell;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

impl Rendezvous {
    /// Connects to the other processes. They must connect within `timeout`, know the secret of the job, whose source is
    /// given by the environment, and have the same [`Identity`](crate::identity::Identity), as text.
    ///
    /// # Errors
    /// Which rank did not connect, or differs in what.
    pub fn meet(launch: &Launch, identity: &str, timeout: Duration) -> Result<Rendezvous> {
        let source =
            SecretSource::of(launch, |name| std::env::var(name).ok()).map_err(CommError::from)?;
        Rendezvous::meet_with(launch, &source, identity, timeout)
    }

    /// As [`Rendezvous::meet`], with the secret from `source`.
    ///
    /// # Errors
    /// The same as for [`Rendezvous::meet`].
    pub fn meet_with(
        launch: &Launch,
        source: &SecretSource,
        identity: &str,
        timeout: Duration,
    ) -> Result<Rendezvous> {
        let Some((host, port)) = &launch.master else {
            return fail("several processes need MASTER_ADDR and MASTER_PORT".into());
        };
        let end = Instant::now() + timeout;
        let (peers, secret) = match launch.rank {
            0 => receive_others((host, *port), launch.world_size, source, identity, timeout)?,
            rank => {
                let greeting = format!("{rank} {} {identity}", launch.world_size);
                let entered = enter((host, *port), source, greeting.as_bytes(), end);
                let (stream, secret) = entered.map_err(|e| {
                    CommError::from(format!("rank 0 does not answer at {host}:{port}: {e}"))
                })?;
                (vec![(0, stream)], secret)
            }
        };
        let meeting = Rendezvous {
            rank: launch.rank,
            world_size: launch.world_size,
            timeout,
            secret,
            failure: Arc::default(),
            done: Arc::default(),
            inbox: Arc::default(),
            watched: AtomicBool::new(false),
            numbers: Arc::default(),
            peers,
        };
        *meeting.numbers.0.lock().unwrap_or_else(PoisonError::into_inner) =
            vec![VecDeque::new(); meeting.peers.len()];
        // Rank 0 notifies all when all are connected.
        meeting.share(Vec::new())?;
        Ok(meeting)
    }
}

/// How long ranks that have not connected are waited for when the job cannot begin, to tell them why.
const GRACE: Duration = Duration::from_secs(5);

/// Waits on rank 0 for the others; returns them by rank, and the secret.
fn receive_others(
    (host, port): (&str, u16),
    world_size: usize,
    source: &SecretSource,
    identity: &str,
    timeout: Duration,
) -> Result<(Vec<(usize, TcpStream)>, Secret)> {
    let door = Door::open(host, port).map_err(|e| {
        CommError::from(format!(
            "rank 0 cannot listen at {host}:{port} (MASTER_ADDR, MASTER_PORT): {e}"
        ))
    })?;
    // The file is removed when all have connected.
    let (secret, _written) = source.make().map_err(CommError::from)?;
    let mut peers: Vec<(usize, TcpStream)> = Vec::new();
    // Why the job cannot begin, and how many are still to be told: they would wait for an answer.
    let mut failed: Option<(CommError, usize)> = None;
    let end = Cell::new(Instant::now() + timeout);
    let (turned_away, complete) = door.admit(&secret, &end, |(stream, greeting)| {
        if let Some((error, missing)) = &mut failed {
            refuse(&[(usize::MAX, stream)], &error.to_string());
            *missing -= 1;
            return Ok::<bool, CommError>(*missing == 0);
        }
        match check_greeting(&String::from_utf8_lossy(&greeting), world_size, identity, &peers) {
            Ok(rank) => {
                peers.push((rank, stream));
                Ok(peers.len() + 1 == world_size)
            }
            Err(error) => {
                refuse(&peers, &error.to_string());
                refuse(&[(usize::MAX, stream)], &error.to_string());
                let missing = world_size.saturating_sub(peers.len() + 2);
                end.set(end.get().min(Instant::now() + GRACE));
                failed = Some((error, missing));
                Ok(missing == 0)
            }
        }
    })?;
    if let Some((error, _)) = failed {
        return Err(error);
    }
    if complete {
        peers.sort_by_key(|(rank, _)| *rank);
        return Ok((peers, secret));
    }
    let missing: Vec<String> = (1..world_size)
        .filter(|r| peers.iter().all(|(p, _)| p != r))
        .map(|r| r.to_string())
        .collect();
    let mut reason =
        format!("rank {} did not connect within {} s", missing.join(", "), timeout.as_secs_f64());
    refuse(&peers, &reason);
    reason += &format!(" to {}", door.address());
    if turned_away > 0 {
        reason += &format!(
            "; {} had another secret, or took too long",
            frit_ir::counted(turned_away, "connection")
        );
    }
    fail(reason)
}

/// The rank in a greeting.
fn check_greeting(
    greeting: &str,
    expected: usize,
    identity: &str,
    peers: &[(usize, TcpStream)],
) -> Result<usize> {
    let mut words = greeting.splitn(3, ' ');
    let mut number = || words.next().and_then(|w| w.parse::<usize>().ok());
    let (Some(rank), Some(world_size)) = (number(), number()) else {
        return fail(format!("a process sent `{greeting}`, not a greeting"));
    };
    if world_size != expected || rank == 0 || rank >= world_size {
        return fail(format!(
            "rank {rank} was started for {world_size} processes, rank 0 for {expected}"
        ));
    }
    if peers.iter().any(|(r, _)| *r == rank) {
        return fail(format!("two processes were started as rank {rank}"));
    }
    match difference(rank, words.next().unwrap_or_default(), identity) {
        Some(difference) => fail(difference),
        None => Ok(rank),
    }
}
