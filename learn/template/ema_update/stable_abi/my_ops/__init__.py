from my_ops._ema_update import ema_update_ as ema_update_
