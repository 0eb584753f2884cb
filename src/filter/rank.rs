//! Groups in the order of their scores.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::objective::precise;

/// Groups by descending key, ineligible ones last. Keys are sorted without their groups, since a sort
/// that keeps equal keys in order costs more: the first `count` groups are those above the `count`-th
/// key, and of those equal to it the first in the order of the groups.
pub(super) struct Ranking<'a> {
    /// `[P]`, −∞ where ineligible.
    keys: &'a Tensor,
    /// `[P]` bool.
    eligible: &'a Tensor,
    /// `[P]`, the keys in descending order.
    sorted: Tensor,
}

impl<'a> Ranking<'a> {
    /// Sorts keys `[P]`, `P` at least 1, that hold no NaN.
    pub fn new(keys: &'a Tensor, eligible: &'a Tensor) -> Result<Self> {
        let (sorted, _) = keys.f_sort(0, true)?;
        Ok(Self { keys, eligible, sorted })
    }

    /// The keys `[P]` in descending order.
    pub fn sorted(&self) -> &Tensor {
        &self.sorted
    }

    /// `[P]` bool: the first `count` `[1]` (int64, of this device) groups; ineligible ones among them
    /// are left out.
    pub fn first(&self, count: &Tensor) -> Result<Tensor> {
        let place = (count - 1).clamp(0, self.sorted.size()[0] - 1);
        let cut = self.sorted.f_gather(0, &place, false)?;
        let above = self.keys.f_gt_tensor(&cut)?;
        let tied = self.keys.f_eq_tensor(&cut)?.bitwise_and_tensor(self.eligible);
        let room = count - above.sum(Kind::Int64);
        let in_room = tied.cumsum(0, Kind::Int64).le_tensor(&room);
        Ok(above.bitwise_or_tensor(&tied.bitwise_and_tensor(&in_room)))
    }

    /// The same for a number that the host knows; nothing is copied to the device.
    pub fn first_number(&self, count: i64) -> Result<Tensor> {
        let like = self.sorted.narrow(0, 0, 1).to_kind(Kind::Int64);
        self.first(&like.full_like(count))
    }

    /// `[P]` in the precision that sums are taken in.
    pub fn sorted_precise(&self) -> Tensor {
        self.sorted.to_kind(precise(self.sorted.device()))
    }
}
